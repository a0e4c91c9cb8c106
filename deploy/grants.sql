-- Roles for a server of your own, MySQL 8 or MariaDB 10.6 and later. Run as an administrator after `tidings migrate`, with the database's name
-- in the place of `tidings`; run it again after an upgrade. Then make accounts, and give them their role:
--
--   CREATE USER 'tidings'@'10.0.0.%' IDENTIFIED BY '…';
--   GRANT tidings_runtime TO 'tidings'@'10.0.0.%';
--   SET DEFAULT ROLE tidings_runtime FOR 'tidings'@'10.0.0.%';   -- MariaDB
--   SET DEFAULT ROLE tidings_runtime TO 'tidings'@'10.0.0.%';    -- MySQL

-- What the program does all day (mysql.dsn). It cannot make, change or drop a table.
CREATE ROLE IF NOT EXISTS tidings_runtime;
GRANT SELECT, INSERT, UPDATE, DELETE ON tidings.* TO tidings_runtime;

-- What makes and changes tables: migrations, days of the history, the ring of delay tables, restored archives (mysql.migrator_dsn).
CREATE ROLE IF NOT EXISTS tidings_migrator;
GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX, CREATE VIEW, SHOW VIEW ON tidings.* TO tidings_migrator;

-- Who looks: people and reports.
CREATE ROLE IF NOT EXISTS tidings_reader;
GRANT SELECT, SHOW VIEW ON tidings.* TO tidings_reader;

-- Services that hand in requests by SQL: only the columns that are theirs to fill in, and nothing to read.
CREATE ROLE IF NOT EXISTS tidings_intake;
GRANT INSERT (source_id, request_id, template_id, channels, priority, category, receiver, params, content, send_at, expire_time) ON tidings.t_msg_submit TO tidings_intake;
