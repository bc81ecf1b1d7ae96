class StructuredOutputsParams:
    pass
