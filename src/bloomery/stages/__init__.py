"""Where packages meet: one function per stage of a recipe."""
