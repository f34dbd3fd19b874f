"""Stores of files: local folders, object stores, HDFS and web servers, read by ranges of bytes."""
