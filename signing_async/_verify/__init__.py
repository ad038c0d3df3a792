"""Judge sealed PDFs with pyHanko, in a separate process, because the files may be hostile."""
