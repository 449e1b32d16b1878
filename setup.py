"""What pyproject.toml cannot say: the README for an index of packages, where no file lies beside it."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def readme() -> str:
    """README.md with links and pictures that lead to the repository, where they were relative."""
    source = re.search(
        r'^Source = "https://github\.com/([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert source is not None, "pyproject.toml names no Source"
    pictures = f"https://raw.githubusercontent.com/{source[1]}/main/"
    pages = f"https://github.com/{source[1]}/blob/main/"
    return LINK.sub(
        lambda found: f"{found[1]}[{found[2]}]({pictures if found[1] else pages}{found[3]})",
        (ROOT / "README.md").read_text(encoding="utf-8"),
    )


setup(long_description=readme(), long_description_content_type="text/markdown")
