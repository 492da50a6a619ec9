"""Texts of models from their own configurations: `config.json` of Hugging Face and its variants.

`reading` reads and checks, a module of `families` for each group of families says what is computed,
`writing` writes it down; `common` is what families share. Nothing is downloaded, nothing of a file
is executed.
"""
