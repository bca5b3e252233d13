"""Performer language models of proteins, trained on FASTA files."""
