"""What rules look at: characters, words and lines of a batch of documents, each found once for all rules."""
