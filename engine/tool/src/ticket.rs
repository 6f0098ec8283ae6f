//! What a peer needs to know of a source: where it is, and which life of it is meant.

use std::{fmt, net::SocketAddr, str::FromStr};

use verbs_engine::Epoch;

/// Written as `ADDR:PORT/EPOCH`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) endpoint: SocketAddr,
    pub(crate) epoch: Epoch,
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.endpoint, self.epoch)
    }
}

impl FromStr for Ticket {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shape = "a ticket is what `verbs-engine serve` prints: ADDR:PORT/EPOCH";
        let (endpoint, epoch) = text.split_once('/').ok_or(shape)?;
        let endpoint = endpoint.parse().map_err(|error| format!("{endpoint:?}: {error}; {shape}"))?;
        let epoch = epoch.parse().map_err(|error| format!("{error}; {shape}"))?;
        Ok(Self { endpoint, epoch })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_survives_its_text() {
        for endpoint in ["127.0.0.1:7000", "[::1]:7000"] {
            let ticket =
                Ticket { endpoint: endpoint.parse().expect("an address"), epoch: Epoch::from_bytes([0x5a; 16]) };
            assert_eq!(ticket.to_string().parse(), Ok(ticket));
        }
        for text in ["", "127.0.0.1:7000", "127.0.0.1/00", "localhost:1/5a", "127.0.0.1:7000/5a"] {
            let error = text.parse::<Ticket>().expect_err(text);
            assert!(error.contains("ADDR:PORT/EPOCH"), "{error}");
        }
    }
}
