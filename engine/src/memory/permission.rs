//! What peers may do with a range.

/// What peers may do with a range. Local access is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Permission {
    /// Nothing: the range serves this engine's own requests, and peers do not see it.
    LocalOnly = 0,
    /// READ.
    RemoteRead = 1,
    /// WRITE.
    RemoteWrite = 2,
    /// READ and WRITE.
    RemoteReadWrite = 3,
}

impl Permission {
    /// From the bits of the wire: 1 is READ, 2 is WRITE.
    pub(crate) fn from_bits(bits: u8) -> Option<Self> {
        match bits {
            0 => Some(Self::LocalOnly),
            1 => Some(Self::RemoteRead),
            2 => Some(Self::RemoteWrite),
            3 => Some(Self::RemoteReadWrite),
            _ => None,
        }
    }

    pub(crate) fn bits(self) -> u8 {
        self as u8
    }

    /// Whether peers may READ.
    pub fn allows_read(self) -> bool {
        self.bits() & 1 != 0
    }

    /// Whether peers may WRITE.
    pub fn allows_write(self) -> bool {
        self.bits() & 2 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::Permission;

    #[test]
    fn four_values_and_no_more() {
        for bits in 0..=255_u8 {
            let permission = Permission::from_bits(bits);
            assert_eq!(permission.map(Permission::bits), (bits < 4).then_some(bits));
            if let Some(permission) = permission {
                assert_eq!((permission.allows_read(), permission.allows_write()), (bits & 1 == 1, bits & 2 == 2));
            }
        }
    }
}
