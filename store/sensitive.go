package store

import "fmt"

// blanked is params or content of a task as the record keeps it: NULL where what the message said is sensitive. A template says
// whether it is; without one, and where the template was not made for verifications, verifications are. It reads one row by its
// unique key.
func blanked(table, column string) string {
	return fmt.Sprintf("IF(COALESCE((SELECT v.`sensitive` = 1 OR (%[1]s.category = 'verification' AND NOT v.category <=> 'verification') FROM t_msg_template AS v "+
		"WHERE v.source_id = %[1]s.source_id AND v.template_id = %[1]s.template_id AND v.channel = %[1]s.channel AND v.version = %[1]s.template_version), "+
		"%[1]s.category = 'verification'), NULL, %[1]s.%[2]s)", table, column)
}
