"""The judging of sealed PDFs: by pyHanko, in a process of its own, since it reads foreign files."""
