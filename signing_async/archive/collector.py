"""Archive the documents of one signing, under its claim."""
