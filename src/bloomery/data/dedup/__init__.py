"""Deduplication: shingles, MinHash, candidate pairs, exact verification, and the document that stays."""
