//! Writes the "newc" cpio archives that the kernel unpacks as its first root.

use std::io::{self, Write};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// An archive in the making.
pub(crate) struct Archive<W: Write> {
    out: W,
    inode: u32,
}

impl<W: Write> Archive<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    /// A directory; parents come first.
    pub(crate) fn dir(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, DIRECTORY | 0o755, b"")
    }

    /// A regular file with these permission bits.
    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.entry(path, REGULAR | mode, content)
    }

    /// A symbolic link.
    pub(crate) fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, SYMLINK | 0o777, target.as_bytes())
    }

    /// Writes the trailer and hands the writer back.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, b"")?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        let too_long = |_| io::Error::new(io::ErrorKind::InvalidInput, "an initramfs file of 4 GiB or more");
        let size = u32::try_from(content.len()).map_err(too_long)?;
        let name_size = u32::try_from(name.len() + 1).map_err(too_long)?;
        self.inode += 1;
        let links = if mode & 0o170_000 == DIRECTORY { 2 } else { 1 };
        // inode, mode, uid, gid, links, mtime, size, device (2), special file's device (2), name's size, checksum
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        self.out.write_all(b"070701")?;
        for field in fields {
            write!(self.out, "{field:08X}")?;
        }
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(b"\0")?;
        self.pad(6 + 8 * fields.len() + name.len() + 1)?;
        self.out.write_all(content)?;
        self.pad(content.len())
    }

    fn pad(&mut self, written: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..written.next_multiple_of(4) - written])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_format_of_the_kernel_documentation() {
        let mut archive = Archive::new(Vec::new());
        archive.dir("bin").unwrap();
        archive.file("bin/x", 0o755, b"hello").unwrap();
        archive.link("sh", "bin/x").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.starts_with("070701" /* magic */));
        assert_eq!(&text[14..22], "000041ED", "mode of a directory");
        // 110 bytes of header, 4 of name ("bin" and NUL), padded to 116
        let file = &text[116..];
        assert_eq!(&file[14..22], "000081ED", "mode of an executable");
        assert_eq!(&file[54..62], "00000005", "size");
        assert_eq!(&file[94..102], "00000006", "size of the name with its NUL");
        assert_eq!(&file[110..116], "bin/x\0");
        assert_eq!(&file[116..124], "hello\0\0\0");
        assert!(text.contains("TRAILER!!!"));
    }

    #[test]
    fn an_independent_reader_agrees() {
        // The cpio of busybox or GNU, where there is one.
        for reader in [&["cpio", "-t"][..], &["busybox", "cpio", "-t"]] {
            let mut archive = Archive::new(Vec::new());
            archive.file("one", 0o644, b"1").unwrap();
            archive.file("a-longer-name", 0o644, &[7; 4097]).unwrap();
            let bytes = archive.finish().unwrap();
            let child = std::process::Command::new(reader[0])
                .args(&reader[1..])
                .stdin(std::process::Stdio::piped())
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::null())
                .spawn();
            let Ok(mut child) = child else { continue };
            child.stdin.take().unwrap().write_all(&bytes).unwrap();
            let said = child.wait_with_output().unwrap().stdout;
            assert_eq!(String::from_utf8(said).unwrap(), "one\na-longer-name\n", "{reader:?}");
        }
    }
}
