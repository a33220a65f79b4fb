"""Write docker/sentinel.toml: every setting, with its default and what it means (`make docs`)."""

from pathlib import Path

from sentinel import config
from tests.generated_docs import sections

FILE = Path(__file__).parents[2] / "docker" / "sentinel.toml"
HEAD = "# Every setting of sentinel with its default. Made by `make docs` from sentinel/config.py; change a copy."
WIDTH = 110


def text() -> str:
    lines = [HEAD]
    for title, meaning, rows in sections(config.Settings, ""):
        lines += ["", *_comment(meaning)] if title.startswith("[") else [""]
        lines += [title] if title.startswith("[") else []
        for row in rows:
            setting = f"{row.key} = {row.default}"
            line = f"{setting}  # {row.meaning}"
            lines += [line] if len(line) <= WIDTH else [*_comment(row.meaning), setting]
    return "\n".join(lines) + "\n"


def _comment(meaning: str) -> list[str]:
    lines, words = [], meaning.split()
    while words:
        line = "#"
        while words and (line == "#" or len(f"{line} {words[0]}") <= WIDTH):
            line += f" {words.pop(0)}"
        lines.append(line)
    return lines


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
