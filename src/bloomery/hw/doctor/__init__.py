"""What is wrong with a machine, and the line that cures it, in layers: files, torch, what torch computes."""
