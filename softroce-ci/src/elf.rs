//! Reads `depends=` and `softdep=` out of a kernel module: the package has no modules.dep, which depmod makes when a
//! kernel is installed.

/// What a module asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ModInfo {
    /// Modules that must be there first.
    pub(crate) depends: Vec<String>,
    /// Modules that it wants to have first, if they exist (`softdep=pre: ...`).
    pub(crate) wants: Vec<String>,
}

/// Reads the `.modinfo` section of a 64-bit little-endian ELF file; `None` when it is not one.
pub(crate) fn modinfo(elf: &[u8]) -> Option<ModInfo> {
    let section = modinfo_section(elf)?;
    let mut info = ModInfo::default();
    for entry in section.split(|byte| *byte == 0) {
        let entry = String::from_utf8_lossy(entry);
        if let Some(list) = entry.strip_prefix("depends=") {
            info.depends = list.split(',').filter(|name| !name.is_empty()).map(canonical).collect();
        } else if let Some(pre) = entry.strip_prefix("softdep=").and_then(|list| list.strip_prefix("pre:")) {
            let pre = pre.split("post:").next().unwrap_or_default();
            info.wants.extend(pre.split_whitespace().map(canonical));
        }
    }
    Some(info)
}

/// The kernel's name for a module: file names may have `-` where it has `_`.
pub(crate) fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

fn modinfo_section(elf: &[u8]) -> Option<&[u8]> {
    const CLASS64_LITTLE: &[u8] = b"\x7fELF\x02\x01";
    if !elf.starts_with(CLASS64_LITTLE) {
        return None;
    }
    let table = usize::try_from(number(elf, 0x28, 8)?).ok()?;
    let entry_bytes = usize::try_from(number(elf, 0x3a, 2)?).ok()?;
    let count = usize::try_from(number(elf, 0x3c, 2)?).ok()?;
    let names_index = usize::try_from(number(elf, 0x3e, 2)?).ok()?;
    let header = |index: usize| elf.get(table.checked_add(index.checked_mul(entry_bytes)?)?..);
    let content = |header: &[u8]| {
        let offset = usize::try_from(number(header, 0x18, 8)?).ok()?;
        let size = usize::try_from(number(header, 0x20, 8)?).ok()?;
        elf.get(offset..offset.checked_add(size)?)
    };
    let names = content(header(names_index)?)?;
    (0..count).find_map(|index| {
        let header = header(index)?;
        let name = names.get(usize::try_from(number(header, 0, 4)?).ok()?..)?;
        name.starts_with(b".modinfo\0").then(|| content(header)).flatten()
    })
}

fn number(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(width)?)?;
    Some(field.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A minimal ELF file with one `.modinfo` section.
    pub(crate) fn module(modinfo: &[u8]) -> Vec<u8> {
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut elf = vec![0; 0x40];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let (info_at, names_at) = (elf.len(), elf.len() + modinfo.len());
        elf.extend_from_slice(modinfo);
        elf.extend_from_slice(names);
        let table = elf.len();
        for (name, at, size) in [(0_u32, 0, 0), (1, info_at, modinfo.len()), (10, names_at, names.len())] {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(at as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(size as u64).to_le_bytes());
            elf.extend_from_slice(&header);
        }
        elf[0x28..0x30].copy_from_slice(&(table as u64).to_le_bytes());
        elf[0x3a..0x40].copy_from_slice(&[64, 0, 3, 0, 2, 0]);
        elf
    }

    #[test]
    fn dependencies_are_read_and_named_as_the_kernel_does() {
        let elf = module(b"license=GPL\0depends=ib_core,udp-tunnel\0softdep=pre: crc32c post: nothing\0name=x\0");
        let info = modinfo(&elf).unwrap();
        assert_eq!(info.depends, ["ib_core", "udp_tunnel"]);
        assert_eq!(info.wants, ["crc32c"]);
    }

    #[test]
    fn what_is_no_module_is_none_and_never_a_panic() {
        let elf = module(b"depends=\0");
        assert_eq!(modinfo(&elf), Some(ModInfo::default()));
        for cut in 0..elf.len() {
            let _any = modinfo(&elf[..cut]);
        }
        for at in 0..0x40 {
            let mut bent = elf.clone();
            bent[at] = 0xff;
            let _any = modinfo(&bent);
        }
        assert_eq!(modinfo(b"#!/bin/sh"), None);
    }
}
