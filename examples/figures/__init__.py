"""The papers' figures and tables, made anew: one file for each, listed in catalogue.py."""
