"""How Spark finds `format("nsq")` by itself: it looks into every package named pyspark_* for a DefaultSource.

One such package that fails makes Spark give up on all of them without a word. So this one imports nothing
until Spark asks for the class, and says that it has none if the connector cannot be loaded.
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
