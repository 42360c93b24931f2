"""A step of lake.toml: a function that takes a DataFrame and returns one."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

COUNTRIES = {"+44": "GB", "+49": "DE", "+33": "FR"}


def with_country(orders: DataFrame) -> DataFrame:
    prefix = F.substring("phone", 1, 3)
    country = F.coalesce(*(F.when(prefix == code, F.lit(name)) for code, name in COUNTRIES.items()))
    return orders.withColumn("country", country)
