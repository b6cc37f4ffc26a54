"""The command line `pt2mx`, and the models and batches that it reads."""
