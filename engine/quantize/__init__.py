"""`headway quantize`: writes a model folder anew with narrower weights."""
