"""The embedded model: its weights and tokenizer lie in this folder, made by `train.py`."""
