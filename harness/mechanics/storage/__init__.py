"""A file system of our own over the checkpoint folder: chosen operations of chosen ranks fail, crawl or hang in it."""
