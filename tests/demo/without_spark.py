"""`python -m nsparq.demo` on a machine that has no Spark."""

import sys

sys.modules["pyspark"] = None  # type: ignore[assignment]  # as if it were not installed

from nsparq.demo.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
