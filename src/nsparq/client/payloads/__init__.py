"""Between the body of a message and a value of a type: decode for handlers, encode for publish."""
