"""Matrix products of few and many rows, with their prologues and epilogues. The entry is `api.linear`."""
