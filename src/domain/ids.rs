//! Names, as newtypes: parsed once at the edge, then trusted.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

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

/// The full identity of a row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The machine.
    pub kind: Kind,
    /// The tenant.
    pub namespace: Namespace,
    /// Whose it is within the tenant; empty but for stored responses.
    pub scope: Scope,
    /// The name that callers use.
    pub name: Name,
}

impl Key {
    /// A 64-bit hash that every replica, of any build, computes alike. It travels in wake-up
    /// messages and picks a shard; nothing is ever decided by it.
    #[must_use]
    pub fn hash64(&self) -> u64 {
        let mut hasher = Xxh3::new();
        hasher.update(&[self.kind as u8]);
        for part in [self.namespace.as_str(), self.scope.as_str(), self.name.as_str()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.digest()
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
        let key = |namespace: &str, name: &str| Key {
            kind: Kind::Lease,
            namespace: Namespace::from_stored(namespace),
            scope: Scope::none(),
            name: Name::from_stored(name),
        };
        assert_ne!(key("a", "b:c").hash64(), key("a:b", "c").hash64());
        assert_ne!(key("ab", "c").hash64(), key("a", "bc").hash64());
        assert_eq!(key("default", "x").hash64(), 4_580_747_622_235_682_575);
    }
}
