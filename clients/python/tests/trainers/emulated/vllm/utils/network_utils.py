def get_ip() -> str:
    return "127.0.0.1"
