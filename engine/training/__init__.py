"""`headway head`: trains a draft head for a model that ships none, from answers that it wrote itself."""
