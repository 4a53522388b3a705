"""The reference job, which forgets where it was in the data when it resumes."""

from without import run_without

if __name__ == "__main__":
    run_without("sampler")
