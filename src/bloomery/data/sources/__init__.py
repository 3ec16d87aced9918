"""Where documents come from: local files, downloads, buckets, well-known corpora, generated text."""
