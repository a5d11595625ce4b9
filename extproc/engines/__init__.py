"""What engines publish about their load: reading the page, naming the signals, scraping."""
