"""The reference job, which forgets where it was in the learning-rate schedule when it resumes."""

from without import run_without

if __name__ == "__main__":
    run_without("schedule")
