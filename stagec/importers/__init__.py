"""Texts of models from their own configurations: `config.json` of Hugging Face and its kin.

`json_text` and `config` read and check, a module for each group of families says what is computed,
`blocks`, `stack` and `text` write it down. Nothing is downloaded, nothing of a file is executed.
"""
