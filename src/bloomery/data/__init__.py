"""Documents: sources, rules, classifier, near-duplicates, and the generator of small worlds."""
