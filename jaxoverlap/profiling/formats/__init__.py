"""Read the files of profilers, whatever their format, into one form."""
