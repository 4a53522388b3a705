"""The reference job, which forgets the random number generators when it resumes."""

from without import run_without

if __name__ == "__main__":
    run_without("rng")
