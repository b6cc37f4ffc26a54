"""What a prepared or converted model holds and loses: reports, statistics, suggestions."""
