"""The two libraries in C, as the package brought them, or compiled here once into the user's cache.

What comes out is the path of a library that a process of the job loads. The sources are in injectors/native."""
