"""The page on which a person sees what runs do and did."""
