"""Attaches to a model: finds its stages, marks their times, reads its memory and KV cache."""
