"""ir_spec/stg.tables.json: the tables of the parser of texts, from the grammar ir_spec/stg.lark.

`python -m tools.gen_tables` writes them if the grammar or lark changed. Without current tables a
text is parsed as well, but each command takes 0.08 CPU seconds more.
"""

import json
from pathlib import Path

from stagec.text.parser import made_tables, tables_of

PATH = Path(__file__).parent.parent / "ir_spec" / "stg.tables.json"


def main() -> None:
    """Write the file if it is not current: lark numbers the same states otherwise in each run."""
    if not PATH.exists() or json.loads(PATH.read_text(encoding="utf-8"))["of"] != tables_of():
        PATH.write_text(made_tables(), encoding="utf-8")


if __name__ == "__main__":
    main()
