//! Anonymous memory for slabs, in huge pages where they can be had. Safe code: the mapping is `memmap2`'s.
#![deny(unsafe_code)]

use std::{fmt, io, ptr::NonNull};

use memmap2::{Advice, MmapMut, MmapOptions};

/// What pages a pool of slabs lies in. Registering and deregistering cost far less in huge ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Reserved huge pages (`vm.nr_hugepages`).
    Huge,
    /// Ordinary memory, for which transparent huge pages were asked and may have come.
    TransparentHuge,
    /// The base page size; the pool is too small for more.
    Base,
}

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Huge => "reserved huge pages",
            Self::TransparentHuge => "transparent huge pages",
            Self::Base => "base pages",
        })
    }
}

/// Zeroed memory of this process, unmapped on drop. Reached by raw pointer only: a device may write to it.
pub(super) struct Memory {
    /// Never read as a slice after the first pointer was taken: it only unmaps.
    map: MmapMut,
    start: NonNull<u8>,
    bytes: usize,
    kind: PageKind,
}

impl Memory {
    /// `bytes` in reserved huge pages, or `None` when there are too few of them or rounding up would waste more than
    /// an eighth.
    pub(super) fn huge(bytes: usize) -> Option<Self> {
        let rounded = bytes.checked_next_multiple_of(HUGE_BYTES)?;
        if rounded - bytes > bytes / 8 {
            return None;
        }
        let map = MmapOptions::new().len(rounded).huge(Some(HUGE_SHIFT)).map_anon().ok()?;
        Self::aligned(map, bytes, PageKind::Huge).ok()
    }

    /// `bytes` in ordinary pages, aligned and advised for transparent huge ones from 2 MiB on.
    ///
    /// # Errors
    ///
    /// The kernel's, `ENOMEM` as a rule.
    pub(super) fn ordinary(bytes: usize) -> io::Result<Self> {
        if bytes < HUGE_BYTES {
            return Self::aligned(MmapOptions::new().len(bytes.max(1)).map_anon()?, bytes, PageKind::Base);
        }
        // One huge page more of address space than needed; what is not touched takes no memory.
        let map = MmapOptions::new().len(bytes.saturating_add(HUGE_BYTES)).map_anon()?;
        let kind = match map.advise(Advice::HugePage) {
            Ok(()) => PageKind::TransparentHuge,
            Err(_) => PageKind::Base, // a kernel without them
        };
        Self::aligned(map, bytes, kind)
    }

    fn aligned(mut map: MmapMut, bytes: usize, kind: PageKind) -> io::Result<Self> {
        let start = map.as_mut_ptr();
        let skip = if kind == PageKind::TransparentHuge { start.align_offset(HUGE_BYTES) } else { 0 };
        assert!(skip.checked_add(bytes).is_some_and(|end| end <= map.len()), "the mapping holds its aligned part");
        let start = NonNull::new(start.wrapping_add(skip)).ok_or_else(|| io::Error::other("mapping at address 0"))?;
        Ok(Self { map, start, bytes, kind })
    }

    /// First byte; the next `len() - 1` belong to it too, as long as `self` lives.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// What it lies in.
    pub(super) fn kind(&self) -> PageKind {
        self.kind
    }

    /// Bytes of address space that it takes.
    #[cfg(test)]
    fn mapped(&self) -> usize {
        self.map.len()
    }

    /// Leaves the mapping to the process for good, for memory that a device could still reach.
    pub(super) fn leak(self) {
        std::mem::forget(self.map);
    }
}

const HUGE_SHIFT: u8 = 21;
const HUGE_BYTES: usize = 1 << HUGE_SHIFT;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_pool_stays_in_base_pages_and_takes_no_more_than_it_needs() {
        let memory = Memory::ordinary(100_000).expect("100 kB");
        assert_eq!((memory.kind(), memory.len(), memory.mapped()), (PageKind::Base, 100_000, 100_000));
        assert!(Memory::huge(100_000).is_none(), "2 MiB for 100 kB is waste");
    }

    #[test]
    fn a_large_pool_is_aligned_for_huge_pages() {
        let memory = Memory::ordinary(3 << 20).expect("3 MiB");
        if memory.kind() == PageKind::TransparentHuge {
            assert_eq!(memory.start().as_ptr().align_offset(HUGE_BYTES), 0);
        }
        assert_eq!(memory.len(), 3 << 20);
    }
}
