"""Documents: upload PDFs, download sealed ones."""
