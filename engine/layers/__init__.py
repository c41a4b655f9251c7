"""The parts that every model family is built of, and the models made of them."""
