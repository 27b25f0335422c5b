//! Names, as newtypes: parsed once at the edge, then trusted.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

/// Why a text is not acceptable, worded for the person who sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidText(String);

impl std::error::Error for InvalidText {}

impl fmt::Display for InvalidText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn check(text: &str, min: usize, max: usize) -> Result<(), InvalidText> {
    if text.len() < min || text.len() > max {
        return Err(InvalidText(format!(
            "must be {min} to {max} bytes of UTF-8, got {}",
            text.len()
        )));
    }
    match text.bytes().position(|b| b < 0x20 || b == 0x7f) {
        Some(at) => Err(InvalidText(format!(
            "must not contain control characters (U+0000 to U+001F, U+007F); one is at byte {at}"
        ))),
        None => Ok(()),
    }
}

macro_rules! text {
    ($(#[$doc:meta])* $name:ident, $min:literal, $max:literal) => {
        $(#[$doc])*
        ///
        /// Compared byte by byte; no U+0000–U+001F or U+007F.
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The shortest length in bytes of UTF-8.
            pub const MIN_BYTES: usize = $min;
            /// The longest length in bytes of UTF-8.
            pub const MAX_BYTES: usize = $max;

            /// Checks a text that comes from outside.
            ///
            /// # Errors
            ///
            /// Says which rule the text breaks.
            pub fn new(text: impl Into<Arc<str>>) -> Result<Self, InvalidText> {
                let text = text.into();
                check(&text, $min, $max)?;
                Ok(Self(text))
            }

            /// A text that a store kept, which was checked when it came in.
            #[must_use]
            pub fn from_stored(text: impl Into<Arc<str>>) -> Self {
                Self(text.into())
            }

            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidText;

            fn from_str(text: &str) -> Result<Self, InvalidText> {
                Self::new(text)
            }
        }
    };
}

text!(
    /// The name of one thing to coordinate on: 1 to 512 bytes.
    Name, 1, 512
);
text!(
    /// Who holds, or wants to hold, a key: 1 to 256 bytes.
    OwnerId, 1, 256
);
text!(
    /// Who a record belongs to within a namespace, so that callers of one key do not meet: 0 to
    /// 512 bytes.
    Scope, 0, 512
);
text!(
    /// What a record is for, the intent of an execution or the fingerprint of a request: 1 to 512
    /// bytes.
    Binding, 1, 512
);
text!(
    /// A name in the caller's traces: 1 to 256 bytes.
    CorrelationId, 1, 256
);
text!(
    /// Why an administrator did something, for the audit log: 1 to 512 bytes.
    Reason, 1, 512
);
text!(
    /// The beginning of names: 0 to 512 bytes.
    Prefix, 0, 512
);
text!(
    /// The tenant that a key belongs to. Keys of two namespaces never meet.
    Namespace, 1, 256
);

impl Default for Scope {
    fn default() -> Self {
        Self::none()
    }
}

impl Scope {
    /// The empty scope.
    #[must_use]
    pub fn none() -> Self {
        Self(Arc::from(""))
    }
}

impl Namespace {
    /// The namespace of a service without access control.
    #[must_use]
    pub fn default_namespace() -> Self {
        Self(Arc::from("default"))
    }
}

/// Which machine a key belongs to. The numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A lease.
    Lease = 1,
    /// A leader, which is a lease in a key space of its own.
    Leader = 2,
    /// An execution.
    Execution = 3,
    /// A stored response.
    Idempotency = 4,
}

/// The full identity of a row: kind, namespace, scope and name, as one text, in which
/// [`Key::SEPARATOR`] stands between them. Its order is theirs, one after the other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Arc<str>);

impl Key {
    /// What stands between the parts: U+001F, which none of them can contain.
    pub const SEPARATOR: char = '\u{1f}';

    /// The key of these parts.
    #[must_use]
    pub fn new(kind: Kind, namespace: &Namespace, scope: &Scope, name: &str) -> Self {
        let (kind, namespace, scope) = (char::from(b'0' + kind as u8), &*namespace.0, &*scope.0);
        let separator = Self::SEPARATOR;
        Self(format!("{kind}{separator}{namespace}{separator}{scope}{separator}{name}").into())
    }

    /// A key as a store kept it.
    #[must_use]
    pub fn from_stored(text: impl Into<Arc<str>>) -> Self {
        Self(text.into())
    }

    /// The whole text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The machine; `None` for one that this version does not know.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        Some(match self.0.as_bytes().first()? {
            b'1' => Kind::Lease,
            b'2' => Kind::Leader,
            b'3' => Kind::Execution,
            b'4' => Kind::Idempotency,
            _ => return None,
        })
    }

    /// The tenant. Keys of two namespaces never meet.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.0.split(Self::SEPARATOR).nth(1).unwrap_or_default()
    }

    /// The name that callers use.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.rsplit(Self::SEPARATOR).next().unwrap_or_default()
    }

    /// A 64-bit hash that every replica, of any build, computes alike. It travels in wake-up
    /// messages and picks a shard; nothing is ever decided by it.
    #[must_use]
    pub fn hash64(&self) -> u64 {
        xxh3_64(self.0.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_count_bytes_not_characters() {
        assert!(Name::new("é".repeat(256)).is_ok());
        assert!(Name::new("é".repeat(257)).is_err());
        assert!(Name::new("").is_err());
        assert!(Name::new("a\u{0}b").is_err());
        assert!(Name::new("a\u{7f}").is_err());
        assert!(Name::new(" .. ").is_ok());
    }

    #[test]
    fn hashes_are_the_same_in_every_build_and_keep_parts_apart() {
        let key = |namespace, name| {
            Key::new(Kind::Lease, &Namespace::from_stored(namespace), &Scope::none(), name)
        };
        assert_ne!(key("a", "b:c").hash64(), key("a:b", "c").hash64());
        assert_ne!(key("ab", "c").hash64(), key("a", "bc").hash64());
        assert_eq!(key("default", "x").hash64(), 1_953_305_087_662_282_151);
    }

    #[test]
    fn a_key_is_read_as_it_was_made_and_ordered_by_its_parts() {
        let key = |kind, namespace, scope, name| {
            let scope = Scope::from_stored(scope);
            Key::new(kind, &Namespace::from_stored(namespace), &scope, name)
        };
        let one = key(Kind::Idempotency, "n", "s", "a b");
        assert_eq!(one.kind(), Some(Kind::Idempotency));
        assert_eq!((one.namespace(), one.name()), ("n", "a b"));
        assert_eq!(Key::from_stored(one.as_str()), one);
        // A shorter scope comes first, whatever follows it.
        assert!(key(Kind::Lease, "n", "s", "z") < key(Kind::Lease, "n", "s!", "a"));
        assert!(key(Kind::Lease, "z", "", "z") < key(Kind::Leader, "a", "", "a"));
    }
}
