"""Documents of text in stored files: plain text, rows of records, and arrays of token ids."""
