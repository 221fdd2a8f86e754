"""`pytest tests/scenarios --rewrite-scenarios`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write today's answers into tests/scenarios/*.txt, to be reviewed as a diff",
    )
