"""Readers of documents: text, jsonl, parquet, csv, WARC and HTML. What is wrong with a row is data, not an error."""
