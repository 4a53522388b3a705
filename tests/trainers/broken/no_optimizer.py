"""The reference job, which forgets the optimizer's state when it resumes."""

from without import run_without

if __name__ == "__main__":
    run_without("optimizer")
