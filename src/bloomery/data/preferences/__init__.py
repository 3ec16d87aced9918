"""Pairs of a better and a worse answer, single answers that are wanted or not, and questions with one right number."""
