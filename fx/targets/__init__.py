"""Translations of a converted model's MX operators into the dialects of other compilers."""
