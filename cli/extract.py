def extract() -> None:
    """x"""
