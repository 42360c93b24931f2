"""Lets Spark find `format("nsq")` by itself: it looks for a DefaultSource in all packages
pyspark_*.

If one of these packages fails to import, Spark silently ignores all of them. So this one imports
nothing until Spark asks for the class. If the connector cannot be loaded, it has no such class.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsparq.spark.datasource import NsqDataSource as DefaultSource

__all__ = ["DefaultSource"]

logger = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    if name == "DefaultSource":
        try:
            from nsparq.spark.datasource import NsqDataSource

            return NsqDataSource
        except ImportError as error:
            logger.warning('format("nsq") cannot be loaded: %s', error)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
